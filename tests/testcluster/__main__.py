"""``python -m tests.testcluster``."""

import sys

from tests.testcluster.cli import main

sys.exit(main())
