"""Make a diagnosed pipeline faster and prove it: find its modules, feed them data, tune them."""
