"""Events into tables, plots and one page: `write.write_report(folder)`. Needs the extra [report]."""
