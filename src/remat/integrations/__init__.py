"""Other libraries, met halfway.

`masks.py` and `loss_only.py` import none of them: what is not loaded needs no care. A file that bears a library's name
is for those who have it, and imports it.
"""
