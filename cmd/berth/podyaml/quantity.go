package podyaml

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
)

// quantityParents are the fields whose values are quantities by resource name.
var quantityParents = []string{"limits", "requests", "overhead"}

// badQuantities returns the fields of a manifest with malformed quantities. The decoder's error
// names neither the field nor the value.
func badQuantities(manifest []byte) []Problem {
	var root any
	if json.Unmarshal(manifest, &root) != nil {
		return nil
	}
	var problems []Problem
	eachField("", root, func(path, parent, name string, value any) {
		text, isText := value.(string)
		if !isText || name != "sizeLimit" && !slices.Contains(quantityParents, parent) {
			return
		}
		if _, err := resource.ParseQuantity(text); err != nil {
			problems = append(problems, Problem{path, fmt.Sprintf("%q is not a quantity; write %s", text, exampleQuantity(name, text))})
		}
	})
	return problems
}

// eachField calls do for each field below value, in the order of the names.
func eachField(path string, value any, do func(path, parent, name string, value any)) {
	switch value := value.(type) {
	case []any:
		for i, item := range value {
			eachField(fmt.Sprintf("%s[%d]", path, i), item, do)
		}
	case map[string]any:
		for _, name := range slices.Sorted(maps.Keys(value)) {
			below := strings.TrimPrefix(path+"."+name, ".")
			do(below, path[strings.LastIndexByte(path, '.')+1:], name, value[name])
			eachField(below, value[name], do)
		}
	}
}

// exampleQuantity returns a valid quantity that is close to text: 64Mi for 64Mb.
func exampleQuantity(name, text string) string {
	if name == "cpu" {
		return "for example 500m or 2"
	}
	number := strings.TrimRight(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
	unit := strings.ToUpper(strings.TrimSpace(text[len(number):]))
	if unit != "" && strings.Contains("KMGTPE", unit[:1]) {
		binary := number + unit[:1] + "i"
		if _, err := resource.ParseQuantity(binary); err == nil {
			return fmt.Sprintf("%s (powers of 1024) or %s (powers of 1000)", binary, number+strings.Replace(unit[:1], "K", "k", 1))
		}
	}
	return "for example 64Mi or 1Gi"
}
