"""Planner: what the machine has, what a model will take, whether it fits, and what bounds its speed."""

from strata.planner.facts import ModelFacts, model_facts
from strata.planner.machine import Machine
from strata.planner.memory import plan, read_facts
from strata.planner.of_load import plan_file, plan_of_load
from strata.planner.options import PlanOptions

__all__ = ["Machine", "ModelFacts", "PlanOptions", "model_facts", "plan", "plan_file", "plan_of_load", "read_facts"]
