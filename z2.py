main()
