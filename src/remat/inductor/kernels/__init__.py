"""Kernels that Inductor has made: what each computes, how long it takes, and what that says of the prices of others."""
