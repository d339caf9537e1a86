from fcp_cli.cli.app import main

main()
