"""This machine: cores, memory, devices, network, processes, installed software. Imports no other subpackage."""
