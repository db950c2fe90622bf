"""What a command tells the shell that called it."""

OK, PROBLEMS, USAGE = 0, 1, 2
INTERRUPTED = 130  # what a shell itself reports for SIGINT
