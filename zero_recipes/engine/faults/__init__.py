"""What is wrong in the libraries that a run uses, and what is done about it. One file a fault.

Each file's docstring has the same form, from which scripts/reference.py makes docs/library_faults.md:

- a line with what a user sees: the error's text, or the wrong number;
- what goes wrong, and for whom;
- `Library:` its name, the version in which it was seen, and the file;
- `Upstream:` the issue, or "none found";
- `Here:` what this project does;
- `See it:` what the program needs, and the program. It ends without an error where the fault is there.

`apply` changes a library for the rest of the process. Functions of other names are called where the fault would show.
"""
