#!/bin/sh
# Writes steps.csv anew, from the repository's root.
R=experiments/results/edge/steps.csv
rm -f $R
P=".venv/bin/python -m experiments.edge.iree --rows=$R"
$P --models=mlp,lenet,transformer --rounds=3 --seconds=0.2
$P --models=mobilenetv2 --rounds=3 --seconds=0.2 --levels=O1
