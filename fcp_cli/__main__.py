from fcp_cli.app import main

main()
