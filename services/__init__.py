"""The five services. They talk by messages and never import each other."""
