package inventory

import (
	"bytes"
	"encoding/json"
	"regexp"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// differs lists the parts of CRI messages that differ in each run.
var differs = []struct {
	pattern *regexp.Regexp
	with    string
}{
	{regexp.MustCompile(`(^|[^:]|[^6]:)[0-9a-f]{64}`), "$1#"},      // IDs of pods and containers, not digests (sha256:)
	{regexp.MustCompile(`"\d{19}"`), `"T"`},                        // times in nanoseconds
	{regexp.MustCompile(`"\d{4}-\d\d-\d\dT[^"]*"`), `"T"`},         // and in words
	{regexp.MustCompile(`,"(attempt|podSandboxAttempt)":\d+`), ""}, // counts of retries
	{regexp.MustCompile(`\b\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b`), "IP"},
	{regexp.MustCompile(`/\d+\.log`), "/#.log"},
	{regexp.MustCompile(`/proc/\d+/`), "/proc/#/"},
}

// AddMessage adds a message without the parts that differ in each run.
func (s Items) AddMessage(kind string, m proto.Message) error {
	text, err := compact(m)
	if err != nil {
		return err
	}
	s.Add(kind, withoutDiffering(text))
	return nil
}

func withoutDiffering(text string) string {
	for _, d := range differs {
		text = d.pattern.ReplaceAllString(text, d.with)
	}
	return text
}

// compact returns a message as compact JSON.
func compact(m proto.Message) (string, error) {
	data, err := protojson.Marshal(m)
	if err != nil {
		return "", err
	}
	var text bytes.Buffer // protojson adds random blanks
	err = json.Compact(&text, data)
	return text.String(), err
}
