"""What this machine is: cores, memory, devices, network, processes, installed software. Imports no other room."""
