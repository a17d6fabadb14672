package main

import "github.com/urfave/cli/v2"

func sweepCommand() *cli.Command {
	return &cli.Command{
		Name:            "sweep",
		Usage:           "remove what dead engines leave in shared memory (not built yet)",
		Description:     "Will find regions in shared memory, prove for each whether anyone still uses it, and remove the dead ones.",
		SkipFlagParsing: true,
		Action:          notYet("sweep"),
	}
}
