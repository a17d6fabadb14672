package main

import "github.com/urfave/cli/v2"

func traceCommand() *cli.Command {
	return &cli.Command{
		Name:            "trace",
		Usage:           "key hashes, and why a lookup missed (not built yet)",
		Description:     "Will recompute block hashes and offload keys, and give the verdict for a request that missed.",
		SkipFlagParsing: true,
		Action:          notYet("trace"),
	}
}
