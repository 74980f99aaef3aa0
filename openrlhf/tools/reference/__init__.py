"""The reference: each formula as its paper has it, and each output by transformers' own forward pass, one
sequence at a time, without packing or sharding. Tools and tests compare the product with it, so it uses none
of the product's formulas."""
