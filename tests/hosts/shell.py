"""Stands in for ssh: runs a command on a virtual host, with this process's standard input, output and error.

    python shell.py FOLDER [OPTION...] HOST COMMAND...

As with ssh the command is one text for the host's shell, its environment is that of a fresh login, and the exit code is
the command's; 255 where the host cannot be reached.
"""

from __future__ import annotations

import json
import socket
import sys

NOT_REACHED = 255
# Options of ssh that are followed by a value.
WITH_VALUE = frozenset("-" + letter for letter in "BbcDEeFIiJLlmOopQRSWw")


def main(folder: str, arguments: list[str]) -> int:
    """Run the command to its end."""
    while arguments and arguments[0].startswith("-"):
        del arguments[: 2 if arguments[0] in WITH_VALUE else 1]
    if len(arguments) < 2:
        print("usage: shell.py FOLDER [OPTION...] HOST COMMAND...", file=sys.stderr)
        return NOT_REACHED
    host, *command = arguments
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(f"{folder}/{host}.socket")
        text = json.dumps(["/bin/sh", "-c", " ".join(command)]).encode()
        socket.send_fds(connection, [text], [0, 1, 2])
        answer = connection.recv(1)
    except OSError as error:
        print(f"host {host} cannot be reached: {error}", file=sys.stderr)
        return NOT_REACHED
    # No answer: the host ended before the command.
    return answer[0] if answer else NOT_REACHED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
