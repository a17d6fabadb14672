package bench

import (
	"errors"
	"fmt"
	"math"
)

// Claim is a figure of a published table beside what a daemon does with the same geometry, capacity and requests.
type Claim struct {
	Row       string  `json:"row"`
	Reference float64 `json:"reference"`
	Policy    string  `json:"reference_policy"`
	Got       float64 `json:"got"`
	Verdict   string  `json:"verdict"`        // better, equal, worse
	Note      string  `json:"note,omitempty"` // where the daemon is not driven as the row says, how it is
	Decimals  int     `json:"decimals"`       // with which the reference was printed
}

// ErrWorse tells that a daemon does worse than a reference.
var ErrWorse = errors.New("worse than the reference")

// judge compares the figure with the reference as it was printed.
func (c *Claim) judge() {
	half := 0.5001 * math.Pow10(-c.Decimals)
	switch d := c.Got - c.Reference; {
	case d < -half:
		c.Verdict = "worse"
	case d > half:
		c.Verdict = "better"
	default:
		c.Verdict = "equal"
	}
}

// Err is an error of ErrWorse if the claim does not hold.
func (c *Claim) Err() error {
	if c.Verdict != "worse" {
		return nil
	}
	return fmt.Errorf("%s: %.*f, the reference has %.*f: %w", c.Row, c.Decimals+1, c.Got, c.Decimals, c.Reference, ErrWorse)
}

// Text is the claim as a line for people.
func (c *Claim) Text() string {
	line := fmt.Sprintf("%-6s  %.*f  reference %.*f  %s (%s)", c.Verdict, c.Decimals+1, c.Got, c.Decimals, c.Reference, c.Row, c.Policy)
	if c.Note != "" {
		line += "; " + c.Note
	}
	return line
}
