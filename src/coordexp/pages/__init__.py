"""Every HTML page of the project: records, an evaluation, single rollouts, and the report of runs.

A page is one file that loads nothing. All pages share `document` (header, style, tables), `charts` and `images`.
Nothing but the command line imports this package, and it imports no torch.
"""
