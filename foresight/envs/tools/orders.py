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

    def __init__(self) -> None:
        self._orders: dict[int, dict[str, Any]] = {}
        self._wanted: dict[int, dict[str, Any]] = {}
        self._allowed = self._looked_up = False

    @staticmethod
    def questions(size: int = 1_200, seed: int = 0) -> list[dict[str, Any]]:
        """`size` requests about orders, of which about half are allowed."""
        draw = random.Random(seed)
        return [_request(draw) for _ in range(size)]

    def reset(self, row: dict[str, Any]) -> str:
        """The customer's request."""
        self._orders = {row["number"]: copy.deepcopy(row["order"])}
        self._wanted, self._allowed = _resolved(row)
        reason = f" because it is {row['reason']}" if row["reason"] else ""
        return f"I am {row['customer']}. {row['wish'].capitalize()} order {row['number']}{reason}."

    def find_order(self, number: int) -> str:
        """Look up an order: owner, state, days since delivery, whether it is a final sale."""
        order = self._orders[number]
        self._looked_up = True
        sale = "final sale" if order["final"] else "regular sale"
        return f"owner {order['owner']}, {order['state']}, {order['days']} days, {sale}"

    def cancel_order(self, number: int) -> str:
        """Cancel an order."""
        self._orders[number]["state"] = "canceled"
        return "canceled"

    def return_order(self, number: int, reason: str) -> str:
        """Take an order back, for a reason."""
        self._orders[number] |= {"state": "returned", "reason": reason}
        return "returned"

    def add_note(self, number: int, text: str) -> str:
        """Add a note to an order, which changes nothing else."""
        self._orders[number].setdefault("notes", []).append(text)
        return "noted"

    def reward(self, answer: str) -> float:
        """1 if every order is as the rules demand and the answer reports whether the request was fulfilled.

        0 for a decision about an order that was not looked up: who refuses everything would be right half of the time.
        """
        now = {key: {k: v for k, v in order.items() if k != "notes"} for key, order in self._orders.items()}
        word = "done" if self._allowed else "refused"
        reported = re.findall(r"done|refused", answer.lower()) == [word]
        return float(self._looked_up and now == self._wanted and reported)

    @staticmethod
    def script(messages: list[dict[str, str]]) -> str:
        """A demonstration: look the order up, then do what is allowed, then report it."""
        request = next(m["content"] for m in messages if m["role"] == "user")
        found = re.match(r"I am (\w+)\. (\w+) order (\d+)(?: because it is (.*))?\.$", request)
        assert found is not None
        customer, wish, number, reason = found[1], found[2].lower(), int(found[3]), found[4]
        results = [m["content"] for m in messages if m["content"].startswith(tool.RESULT)]
        if not results:
            return tool.write("find_order", number=number)
        if len(results) == 2:
            return "done"
        facts = re.search(r"owner (\w+), (\w+), (\d+) days, (\w+) sale", results[0])
        assert facts is not None
        order = {"owner": facts[1], "state": facts[2], "days": int(facts[3]), "final": facts[4] == "final"}
        if not allowed(order, customer, wish, reason):
            return "refused"
        if wish == "cancel":
            return tool.write("cancel_order", number=number)
        return tool.write("return_order", number=number, reason=reason)


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


def _resolved(row: dict[str, Any]) -> tuple[dict[int, dict[str, Any]], bool]:
    """The orders as they should end, and whether the request is allowed."""
    order = copy.deepcopy(row["order"])
    fine = allowed(order, row["customer"], row["wish"], row["reason"])
    if fine:
        order |= {"state": "canceled"} if row["wish"] == "cancel" else {"state": "returned", "reason": row["reason"]}
    return {row["number"]: order}, fine
