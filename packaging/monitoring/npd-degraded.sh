#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Node Problem Detector: 1 where jobs survived with less capacity, else 0; 2 is unknown.
said=$("${UNBROKEN:-unbroken}" health)
status=$?
printf '%s\n' "$said" | head -n 2
case $status in 0 | 2) exit 0 ;; 1) exit 1 ;; *) exit 2 ;; esac
