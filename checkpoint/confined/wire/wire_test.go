package wire

import (
	"encoding/json"
	"strings"
	"testing"

	"berth/internal/testutil"
)

const report = `{"report":{"processes":[{"pid":1,"command":"sh","uid":0,"gid":0,"threads":1}],"memory":1,"openFiles":3}}`

func TestParseAnswer(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		answer string
		valid  bool
	}{
		"report":        {report, true},
		"error":         {`{"error":"no images"}`, true},
		"difference":    {strings.Replace(report, `"memory"`, `"differences":[{"field":"f","archive":"a","expected":"e…"}],"memory"`, 1), true},
		"both":          {strings.Replace(report, `{"report"`, `{"error":"x","report"`, 1), false},
		"neither":       {`{}`, false},
		"two":           {report + report, false},
		"unknown field": {strings.Replace(report, `"memory"`, `"more2":1,"memory"`, 1), false},
		"truncated":     {report[:40], false},
		"negative":      {strings.Replace(report, `"memory":1`, `"memory":-1`, 1), false},
		"more only":     {strings.Replace(report, `"memory"`, `"more":2,"memory"`, 1), false},
		"control":       {strings.Replace(report, "sh", `s\u001bh`, 1), false},
		"long":          {strings.Replace(report, "sh", strings.Repeat("x", maxText+1), 1), false},
		"many": {`{"report":{"processes":[` + strings.Repeat(`{},`, maxList) + `{}],"memory":1,"openFiles":3}}`,
			false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if _, err := ParseAnswer([]byte(tc.answer)); (err == nil) != tc.valid {
				t.Errorf("%v", err)
			}
		})
	}
}

// FuzzParseAnswer checks that an accepted answer is within the limits and survives a second coding.
func FuzzParseAnswer(f *testing.F) {
	f.Add([]byte(report))
	f.Add([]byte(`{"error":"x"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		a, err := ParseAnswer(data)
		if err != nil {
			return
		}
		if r := a.Report; r != nil && (len(r.Differences) > maxList || len(r.Processes) > maxList || r.Memory < 0) {
			t.Fatalf("accepted %+v", r)
		}
		again, err := json.Marshal(a)
		testutil.Must(t, err)
		if _, err := ParseAnswer(again); err != nil {
			t.Fatal(err)
		}
	})
}
