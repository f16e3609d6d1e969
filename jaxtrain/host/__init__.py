"""This process and its machine: files, signals, memory, and the other processes of a program."""
