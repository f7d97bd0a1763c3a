from benchmarks.suite.command import main

main()
