"""The five services. They communicate by messages and never import each other."""
