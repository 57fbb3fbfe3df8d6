"""The two arms of gsm8k_calc.py and their curves."""
