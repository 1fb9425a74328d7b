from coordexp.cli import main

main()
