"""`python3 -m bench`."""

import sys

from .run import main

sys.exit(main())
