"""Tools of servers of the Model Context Protocol, by the official SDK, which speaks its revisions up to 2026-07-28.

A server is a command, which is started and spoken to over its standard input and output, or a URL. Its process gets a
few plain environment variables (PATH, HOME), none with secrets.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from foresight.envs.tools import tool
from foresight.envs.tools.tool import Tool
from foresight.errors import UserError

PAGES = 100  # of a server's list of tools


@contextlib.contextmanager
def connect(servers: Sequence[Any], seconds: float = tool.SECONDS, taken: Collection[str] = ()) -> Iterator[list[Tool]]:
    """The tools of all `servers` (commands, URLs, or servers of the SDK in this process), until the context ends.

    A tool whose name is taken, by another of them or in `taken`, gets a number, as in `read_2`. A call takes at most
    `seconds`. Raises UserError for a server that does not start or does not speak the protocol.
    """
    from anyio.from_thread import start_blocking_portal
    from mcp import Client
    from mcp.client.stdio import StdioServerParameters

    found: list[Tool] = []
    with contextlib.ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal())
        for server in servers:
            given: Any = server
            if isinstance(server, str) and not server.startswith(("http://", "https://")):
                words = _words(server)
                if not words:
                    raise UserError('--mcp takes the command of a server, such as --mcp "python server.py", or a URL.')
                given = StdioServerParameters(command=words[0], args=words[1:])
            name = server if isinstance(server, str) else "the MCP server"
            try:
                manager = portal.wrap_async_context_manager(Client(given, read_timeout_seconds=seconds))
                client = stack.enter_context(manager)
                listed = portal.call(_listed, client)
            except Exception as error:
                raise UserError(f"{name} does not answer as an MCP server: {_reason(error)}.") from error
            for one in listed:
                known = {*taken, *(other.name for other in found)}
                label = next(n for n in (one.name, *(f"{one.name}_{i}" for i in range(2, 999))) if n not in known)
                found.append(_tool(portal, client, one, label, name))
        yield found


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise UserError(f"The command {command} of --mcp cannot be read: {str(error).lower()}.") from error


async def _listed(client: Any) -> list[Any]:
    tools, cursor = [], None
    for _ in range(PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    return tools


def _tool(portal: Any, client: Any, given: Any, label: str, server: str) -> Tool:
    """One tool of a server. It writes unless the server states that it only reads."""

    def run(**arguments: Any) -> str:
        try:
            result = portal.call(client.call_tool, given.name, arguments)
        except Exception as error:
            raise RuntimeError(f"{server} did not answer: {_reason(error)}") from error
        text = "\n".join(_shown(block) for block in result.content)
        if not text and result.structured_content is not None:
            text = str(result.structured_content)
        if result.is_error:
            raise RuntimeError(text or "the tool failed")
        return text

    reads = bool(given.annotations is not None and given.annotations.read_only_hint)
    return Tool(label, given.description or label, dict(given.input_schema), run, not reads)


def _shown(block: Any) -> str:
    """A block of a result as text; pictures and sounds are named."""
    text = getattr(block, "text", None)
    if text is None:
        text = getattr(getattr(block, "resource", None), "text", None)
    return str(text) if text is not None else f"({getattr(block, 'type', 'a part')})"


def _reason(error: BaseException) -> str:
    """The message of an error, or of the first one inside its groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
