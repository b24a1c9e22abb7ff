"""Calls for an accelerator, a device besides the CPU, that torch does not offer for every vendor.

Everything else uses torch.accelerator, torch.Stream and torch.Event, which are the same for all vendors.
"""
