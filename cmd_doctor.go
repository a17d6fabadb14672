package main

import "github.com/urfave/cli/v2"

func doctorCommand() *cli.Command {
	return &cli.Command{
		Name:            "doctor",
		Usage:           "say before a boot that a geometry cannot work (not built yet)",
		Description:     "Will judge the geometry, the host and the engine's command line before the engine boots.",
		SkipFlagParsing: true,
		Action:          notYet("doctor"),
	}
}
