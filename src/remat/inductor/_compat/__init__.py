"""Everything private of torch that compiled training leans on; for torch 2.11 and later."""
