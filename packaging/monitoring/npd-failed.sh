#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Node Problem Detector: 1 where a program met a failure, else 0; 2 is unknown.
said=$("${UNBROKEN:-unbroken}" health)
status=$?
printf '%s\n' "$said" | head -n 2
case $status in 0 | 1) exit 0 ;; 2) exit 1 ;; *) exit 2 ;; esac
