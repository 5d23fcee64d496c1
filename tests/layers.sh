#!/bin/sh
# The layer rule, where the build cannot see it: no include climbs out of its folder, and the code above the library knows
# its public headers only.
set -eu
cd "$(dirname "$0")/.."
bad=0
refuse() { # PATTERN WHERE WHY
    if found=$(grep -nE "$1" -r $2 --include='*.hpp' --include='*.cpp' --include='*.h'); then
        echo "$found"
        echo "  -> $3"
        bad=1
    fi
}
refuse '#include "\.\./' 'src include tools examples tests' 'name the layer: #include "layout/row.hpp"'
refuse '#include "(core|quant|transport|ep|plan)/' 'tools examples' 'tools and examples use include/switchyard only'
refuse '#include "(transport|ep|plan)/' 'src/core src/layout src/quant' 'core, layout and quant are below transport and ep'
refuse '#include "(layout|quant|ep)/' 'src/transport' 'a transport moves bytes and flags, not tokens'
refuse '#include "(transport|quant)/' 'src/plan' 'the planner reckons; it moves no bytes and reads no numbers of tokens'
refuse '#include "(plan)/' 'src/ep' 'ep does not know the planner'
exit $bad
