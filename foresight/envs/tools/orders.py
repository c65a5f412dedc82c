"""`orders`: an order desk with rules. The model serves a customer through tools; the database at the end is graded.

The eight rules are in the instruction that the model reads. What is not allowed is refused, with nothing changed.
"""

from __future__ import annotations

import copy
import random
import re
from typing import Any

from foresight.envs.tools import tool

STATES = ("pending", "shipped", "delivered", "canceled")
NAMES = ("Ann", "Ben", "Eva", "Max", "Mia", "Sam", "Tom", "Zoe")
RETURN_DAYS = 30


class Orders:
    """Requests such as "I am Ann. Cancel order 17."; the outcome is 1 if the database ends as the rules demand."""

    instruction = (
        "You serve customers of a shop. Rules: 1. Look an order up before you decide. 2. Only its owner may change "
        "an order. 3. Only a pending order may be canceled. 4. Only a delivered order may be returned. 5. It may be "
        "returned for 30 days. 6. A final sale is never returned. 7. A return needs the reason that the customer gives."
        " 8. What is not allowed is refused. End with: done, or: refused."
    )
    turns = 10

    def __init__(self) -> None:
        self._orders: dict[int, dict[str, Any]] = {}
        self._wanted: dict[int, dict[str, Any]] = {}
        self._deed, self._word = "", ""
        self._looked_up = self._blind = False

    @staticmethod
    def questions(size: int = 1_200, seed: int = 0, rules: bool = True) -> list[dict[str, Any]]:
        """`size` requests about orders, of which about half are allowed.

        Without `rules`, what the desk should do and report is drawn at random. Demonstrations of that teach the tools
        alone: which request is allowed is left to rewards.
        """
        draw = random.Random(seed)
        requests = [_request(draw) for _ in range(size)]
        return requests if rules else [{**row, "drawn": _drawn(draw)} for row in requests]

    def reset(self, row: dict[str, Any]) -> str:
        """The customer's request."""
        self._orders = {row["number"]: copy.deepcopy(row["order"])}
        self._looked_up = self._blind = False
        self._deed, self._word = row["drawn"] if "drawn" in row else _due(row)
        self._wanted = _after(row, self._deed)
        reason = f" because it is {row['reason']}" if row["reason"] else ""
        return f"I am {row['customer']}. {row['wish'].capitalize()} order {row['number']}{reason}."

    def find_order(self, number: int) -> str:
        """Look up an order: owner, state, days since delivery, whether it is a final sale."""
        order = self._orders[number]
        self._looked_up = True
        sale = "final sale" if order["final"] else "regular sale"
        return f"owner {order['owner']}, {order['state']}, {order['days']} days, {sale}"

    @tool.writes
    def cancel_order(self, number: int) -> str:
        """Cancel an order."""
        self._orders[number]["state"] = "canceled"
        self._blind |= not self._looked_up
        return "canceled"

    @tool.writes
    def return_order(self, number: int, reason: str) -> str:
        """Take an order back, for a reason."""
        self._orders[number] |= {"state": "returned", "reason": reason}
        self._blind |= not self._looked_up
        return "returned"

    @tool.writes
    def add_note(self, number: int, text: str) -> str:
        """Add a note to an order, which changes nothing else."""
        self._orders[number].setdefault("notes", []).append(text)
        return "noted"

    def reward(self, answer: str) -> float:
        """1 if every order is as the rules demand and the answer reports whether the request was fulfilled.

        0 for a decision about an order that was not looked up before: who refuses everything would be right half of the
        time.
        """
        now = {key: {k: v for k, v in order.items() if k != "notes"} for key, order in self._orders.items()}
        reported = re.findall(r"done|refused", answer.lower()) == [self._word]
        return float(self._looked_up and not self._blind and now == self._wanted and reported)

    def script(self, messages: list[dict[str, str]]) -> str:
        """A demonstration: look the order up, then do what is due, then report it."""
        (number,) = self._orders
        results = sum(m["content"].startswith(tool.RESULT) for m in messages)
        if not results:
            return tool.write("find_order", number=number)
        if results == 2 or self._deed == "refuse":
            return self._word
        if self._deed == "cancel":
            return tool.write("cancel_order", number=number)
        return tool.write("return_order", number=number, reason=self._wanted[number]["reason"])


def allowed(order: dict[str, Any], customer: str, wish: str, reason: str | None) -> bool:
    """Whether the rules allow the request."""
    if order["owner"] != customer:
        return False
    if wish == "cancel":
        return bool(order["state"] == "pending")
    return bool(
        order["state"] == "delivered" and order["days"] <= RETURN_DAYS and not order["final"] and reason is not None
    )


def _request(draw: random.Random) -> dict[str, Any]:
    owner = draw.choice(NAMES)
    wish = draw.choice(("cancel", "return"))
    fitting = "pending" if wish == "cancel" else "delivered"
    state = fitting if draw.random() < 0.75 else draw.choice(STATES)
    order = {"owner": owner, "state": state, "days": draw.randint(1, 45) if state == "delivered" else 0,
             "final": draw.random() < 0.15}  # fmt: skip
    reason = draw.choice(("broken", "too small", "too late", None)) if wish == "return" else None
    customer = owner if draw.random() < 0.85 else draw.choice(NAMES)
    return {"number": draw.randint(10, 99), "order": order, "customer": customer, "wish": wish, "reason": reason}


def _drawn(draw: random.Random) -> tuple[str, str]:
    """What a desk without rules does and reports: each with a share that rewards can raise."""
    deed = draw.choices(("refuse", "cancel", "return"), (3, 3, 4))[0]
    return deed, draw.choices(("done", "refused"), (3, 2))[0]


def _due(row: dict[str, Any]) -> tuple[str, str]:
    """What the rules demand that the desk does and reports."""
    fine = allowed(row["order"], row["customer"], row["wish"], row["reason"])
    return (row["wish"], "done") if fine else ("refuse", "refused")


def _after(row: dict[str, Any], deed: str) -> dict[int, dict[str, Any]]:
    """The orders after the deed."""
    order = copy.deepcopy(row["order"])
    if deed == "cancel":
        order["state"] = "canceled"
    elif deed == "return":
        order |= {"state": "returned", "reason": row["reason"] or "none"}
    return {row["number"]: order}
