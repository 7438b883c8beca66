"""``python -m extproc`` is ``pd-extproc``."""

import sys

from extproc.cli import main

sys.exit(main())
