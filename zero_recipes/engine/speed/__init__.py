"""What is slow in the libraries that a run uses, and what is done about it. One file each, in the form of faults/.

Results are the same with and without these changes. docs/performance.md has what they bring.
"""
