"""MCP server with one tool, by the official package of the Model Context Protocol: `python mcp_shop.py`
speaks on stdin and stdout."""

try:
    from mcp.server.mcpserver import MCPServer
except ImportError:  # mcp 1
    from mcp.server.fastmcp import FastMCP as MCPServer

PRICES = {"apple": 2, "pear": 3}
server = MCPServer("shop")


@server.tool()
def price(fruit: str) -> int:
    """Returns what a fruit costs."""
    if fruit not in PRICES:
        raise ValueError(f"no {fruit}; there are {', '.join(PRICES)}")
    return PRICES[fruit]


if __name__ == "__main__":
    server.run()
