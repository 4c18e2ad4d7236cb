"""Run ``python -m benchmarks`` from the root of the repository; ``--help`` lists the options."""

import sys

from benchmarks.run import main

sys.exit(main())
