"""`python -m ullage`: the same as the `ullage` command."""

import sys

from ullage.cli.main import main

sys.exit(main())
