from pseudoreal_dev.cli import main

main()
