#!/bin/sh
# Writes the CSV files of this folder anew, from the repository's root. Takes a quarter of
# an hour.
R=experiments/results/microcontroller/steps.csv
rm -f $R
P=".venv/bin/python -m experiments.microcontroller --rows=$R"
$P --board=all --steps=800
$P --board=all --budget=70%
$P --board=all --batch_size=1 --steps=100 --learning_rate=0.02
$P --model=lenet --board=mps2-an386,mps2-an500 --batch_size=4 --examples=400 \
    --trained=320 --learning_rate=0.05
M="--model=mobilenetv2:width=0.35,depth=0.34 --shrink=2 --board=mps2-an500 --steps=2"
M="$M --batch_size=1 --examples=16 --trained=16 --learning_rate=0.05"
$P $M --update=bias --budget=240KiB --ram=256KiB
$P $M --update=full
S=experiments/results/microcontroller/storage.csv
rm -f $S
P=".venv/bin/python -m experiments.microcontroller --rows=$S --planner=greedy"
$P $M --update=quarter --stored=2KiB --budget=254kB --ram=256KiB
P="$P --stored=4KiB --batch_size=1 --examples=16 --trained=16 --learning_rate=0.01"
$P --model=resnet18 --board=mps2-an500 --steps=2 --budget=16MB --ram=16MiB
$P --model=resnet18:width=4 --board=all --budget=128KiB --ram=256KiB
$P --model=bert2:width=32,length=32 --board=all --budget=112KiB --ram=192KiB
$P --model=bert2:length=64 --board=mps2-an500 --budget=560KiB --ram=640KiB
.venv/bin/python -m experiments.microcontroller.fits \
    --rows=experiments/results/microcontroller/fits.csv
.venv/bin/python -m experiments.microcontroller.averaging \
    --rows=experiments/results/microcontroller/averaging.csv
.venv/bin/python -m experiments.microcontroller.by_hand \
    --board=mps2-an385,mps2-an386,mps2-an500,mps2-an505 \
    --rows=experiments/results/microcontroller/by_hand.csv
