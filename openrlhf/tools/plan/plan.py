"""Predicts what a training run needs, and prints it (`openrlhf plan`)."""

import argparse
import json
import sys
from typing import Any

from openrlhf.api import Command
from openrlhf.tools.plan.estimate import Assumed, plan_run, suggestion
from openrlhf.tools.plan.hardware import Cluster
from openrlhf.tools.plan.view import as_data, show


def run(command: Command, config: Any, cluster: Cluster, options: argparse.Namespace) -> int:
    """Prints the plan. Returns 0 if the run fits, else 1."""
    assumed = Assumed.of(options)
    plan = plan_run(command, config, cluster, assumed)
    suggested = None if plan.fits else suggestion(command, config, cluster, assumed)
    if options.json:
        print(json.dumps(as_data(plan, config, suggested), indent=2))
    else:
        show(plan, config, suggested, sys.stdout)
    return 0 if plan.fits else 1
