package verify

import (
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"slices"
)

// stream matches libcontainer's name of a standard stream. CRIU replaces a pipe of that name by the
// stream that the launcher passes.
var stream = regexp.MustCompile(`^(pipe:\[[0-9]{1,20}\]|/[A-Za-z0-9/_.-]{1,100}|[a-z]{1,20}:\[[0-9]{1,20}\])?$`)

// checkStreams checks the list of standard streams, which libcontainer reads on a restore: the
// index of a pipe in it is the descriptor that replaces the pipe.
func (c *check) checkStreams() error {
	const name, streams, maxSize = "descriptors.json", 3, 4 << 10
	file, err := c.images.open(name)
	if err != nil {
		return err
	}
	defer file.Close() // it was only read
	data, err := io.ReadAll(io.LimitReader(file, maxSize+1))
	if err != nil {
		return err
	}
	var all []string
	if len(data) > maxSize || json.Unmarshal(data, &all) != nil || len(all) > streams {
		c.differ("standard streams", "no list of three", "a list of three")
		return nil
	}
	for i, s := range all {
		if !stream.MatchString(s) && !slices.Contains(c.e.ExternalFiles, s) {
			c.differ(fmt.Sprintf("standard stream %d", i), s, "a pipe or file")
		}
	}
	return nil
}
