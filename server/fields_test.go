package server

import (
	"flag"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/testutil"
)

var update = flag.Bool("update", false, "rewrite testdata/fields.txt")

// apiFields lists the fields of all messages of the API's services as "Message.field", sorted.
func apiFields() []string {
	var fields []string
	seen := map[protoreflect.FullName]bool{}
	var add func(m protoreflect.MessageDescriptor)
	add = func(m protoreflect.MessageDescriptor) {
		if m == nil || seen[m.FullName()] {
			return
		}
		seen[m.FullName()] = true
		for i := range m.Fields().Len() {
			f := m.Fields().Get(i)
			if !m.IsMapEntry() {
				fields = append(fields, string(m.Name())+"."+string(f.Name()))
			}
			add(f.Message())
		}
	}
	services := (&runtimeapi.VersionRequest{}).ProtoReflect().Descriptor().ParentFile().Services()
	for i := range services.Len() {
		for j := range services.Get(i).Methods().Len() {
			method := services.Get(i).Methods().Get(j)
			add(method.Input())
			add(method.Output())
		}
	}
	slices.Sort(fields)
	return fields
}

// docs/conformance.md describes berth's support of each field. With a new version of the API this
// test lists the new fields, which need a decision.
func TestEachFieldIsDocumented(t *testing.T) {
	t.Parallel()
	const golden = "testdata/fields.txt"
	fields := apiFields()
	if *update {
		testutil.Must(t, os.WriteFile(golden, []byte(strings.Join(fields, "\n")+"\n"), 0o644))
	}
	text, err := os.ReadFile(golden)
	testutil.Must(t, err)
	decided := strings.Fields(string(text))
	for _, f := range fields {
		if !slices.Contains(decided, f) {
			t.Errorf("the API has a new field %s: use it, or explain in docs/conformance.md why not; then run this test with -update", f)
		}
	}
	for _, f := range decided {
		if !slices.Contains(fields, f) {
			t.Errorf("the API does not have the field %s any more: see docs/conformance.md; then run this test with -update", f)
		}
	}
}

func TestConformanceNamesRealFields(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../docs/conformance.md")
	testutil.Must(t, err)
	fields := apiFields()
	names := regexp.MustCompile("`([A-Z][A-Za-z]+\\.[a-z_]+)").FindAllStringSubmatch(string(text), -1)
	if len(names) < 20 {
		t.Errorf("only %d fields found in it", len(names))
	}
	for _, name := range names {
		if !slices.Contains(fields, name[1]) {
			t.Errorf("the API has no field %s", name[1])
		}
	}
}
