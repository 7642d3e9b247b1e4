"""Stands in for ssh between two guests, which have none, for Open MPI's `plm_rsh_agent`.

`agent.py --serve ADDRESS` runs what is asked for, one program a connection; `agent.py HOST
COMMAND…` asks for it there, prints what it says and ends with its exit status."""

import socket
import subprocess
import sys
import threading

PORT = 18599
# What ends a program's output: a byte that no text has, and the exit status.
END = b"\0"
COMMAND_BYTES = 1 << 16


def run(connection: socket.socket):
    with connection:
        command = b""
        while (part := connection.recv(COMMAND_BYTES)) and len(command) < COMMAND_BYTES:
            command += part
        # With a pipe, and not the connection itself: what the program leaves behind may hold its
        # output open for longer than it runs.
        program = subprocess.Popen(
            ["bash", "-c", command.decode()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for line in program.stdout:
            connection.sendall(line)
        connection.sendall(END + str(program.wait()).encode())


def serve(address: str):
    with socket.create_server((address, PORT)) as listener:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=run, args=(connection,)).start()


def ask(host: str, command: str) -> int:
    with socket.create_connection((host, PORT), timeout=20) as connection:
        connection.settimeout(None)
        connection.sendall(command.encode())
        connection.shutdown(socket.SHUT_WR)
        said = b""
        while part := connection.recv(4096):
            said += part
            text, end, said = said.rpartition(b"\n")
            sys.stdout.buffer.write(text + end)
            sys.stdout.buffer.flush()
    text, _, status = said.rpartition(END)
    sys.stdout.buffer.write(text)
    return int(status or 255)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(sys.argv[2])
    sys.exit(ask(sys.argv[1], " ".join(sys.argv[2:])))
