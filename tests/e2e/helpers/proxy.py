"""A TCP proxy that delays or holds what goes through, for test_redis.py.

usage: proxy.py PORT TO_PORT, at all addresses of the network namespace, to 127.0.0.1. Commands
come on standard input, one a line: `pass`, `delay MS` (each way), `hold` (nothing goes through
until the next command; connections are taken). Each is written back when it holds.
"""

import asyncio
import sys

CHUNK_BYTES = 65536


class Valve:
    """What is done with each piece."""

    def __init__(self):
        self.delay_s = 0.0
        self.open = asyncio.Event()
        self.open.set()

    def turn(self, word: str, *args: str):
        """Carries a command out."""
        self.delay_s = float(args[0]) / 1000 if word == "delay" else 0.0
        if word == "hold":
            self.open.clear()
        else:
            self.open.set()

    async def through(self):
        """Waits for as long as a piece must."""
        await asyncio.sleep(self.delay_s)
        await self.open.wait()


async def pump(valve: Valve, reader, writer):
    """Moves pieces in one direction until the end."""
    try:
        while piece := await reader.read(CHUNK_BYTES):
            await valve.through()
            writer.write(piece)
            await writer.drain()
        await valve.through()
    except OSError:
        pass
    finally:
        writer.close()


async def main(port: int, to_port: int):
    """Serves until standard input ends."""
    valve = Valve()
    tasks = set()

    async def serve(reader, writer):
        await valve.through()
        try:
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", to_port)
        except OSError:
            writer.close()
            return
        for way in (pump(valve, reader, to_writer), pump(valve, to_reader, writer)):
            task = asyncio.create_task(way)
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    await asyncio.start_server(serve, "0.0.0.0", port)
    print("listening", flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        valve.turn(*line.split())
        print(line.strip(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
