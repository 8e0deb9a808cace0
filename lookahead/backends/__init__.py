"""What packs weights and runs forwards on one kind of device. The core finds these at run time."""
