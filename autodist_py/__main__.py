"""`python -m autodist_py`: the `autodist` command, of this Python."""

from autodist_py.cli import main

main(prog_name="autodist")
