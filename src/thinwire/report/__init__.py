"""Events into tables, plots and one page: `page.write_report(folder)`. Needs the extra [report]."""
