"""Code that runs on the inside of the sandbox. Standard library only, no other part of Penstock.

It is loaded by a bare interpreter (`-I -S`) that cannot see installed packages.
"""
