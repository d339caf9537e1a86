"""Plans and runs for people: tables, pictures, pages, traces, a live view."""
