// Draws the panels of the dashboard with the components of @grafana/ui that Grafana draws them with. What Grafana itself
// would add to the dashboard's file when it loads it (defaults of panel types) is added in `configOf`.
import { createDataFrame, createTheme, dateTime, FieldType, getDisplayProcessor } from '@grafana/data';
import { BigValue, PanelChrome, PanelContextProvider, ThemeContext, TimeSeries, TooltipDisplayMode } from '@grafana/ui';
import { createRoot } from 'react-dom/client';
import 'uplot/dist/uPlot.min.css'; // which Grafana has in its own style sheet

const { dashboard, results, beginMs, endMs, stepMs, widthPx } = window.gracepoint;
const theme = createTheme({ colors: { mode: 'light' } });
const timeZone = 'utc';
const timeRange = {
  from: dateTime(beginMs),
  to: dateTime(endMs),
  raw: { from: dateTime(beginMs), to: dateTime(endMs) },
};
const cellPx = { width: widthPx / 24, height: 38, gap: 8 };

// Grafana's defaults of all panels, and of the two types of panels that the dashboard has.
const everywhere = {
  thresholds: {
    mode: 'absolute',
    steps: [
      { value: -Infinity, color: 'green' },
      { value: 80, color: 'red' },
    ],
  },
};
const graph = {
  drawStyle: 'line',
  lineInterpolation: 'linear',
  lineWidth: 1,
  fillOpacity: 0,
  showPoints: 'auto',
  pointSize: 5,
  spanNulls: false,
  axisPlacement: 'auto',
  stacking: { mode: 'none', group: 'A' },
  hideFrom: { legend: false, tooltip: false, viz: false },
  thresholdsStyle: { mode: 'off' },
};

function configOf(panel, target) {
  const { defaults, overrides } = panel.fieldConfig;
  const made = { ...everywhere, ...defaults };
  const isGraph = panel.type === 'timeseries';
  made.color = defaults.color ?? { mode: isGraph ? 'palette-classic' : 'thresholds' };
  if (isGraph) {
    made.custom = { ...graph, ...defaults.custom };
  }
  for (const override of overrides) {
    if (override.matcher.id !== 'byFrameRefID') {
      throw new Error(`found an override by ${override.matcher.id}, expected byFrameRefID`);
    }
    if (override.matcher.options === target.refId) {
      for (const { id, value } of override.properties) {
        if (id.startsWith('custom.')) {
          made.custom = { ...made.custom, [id.slice('custom.'.length)]: value };
        } else {
          made[id] = value;
        }
      }
    }
  }
  return made;
}

function framesOf(panel) {
  const found = results[panel.id].map(({ target, legend, values }) =>
    createDataFrame({
      refId: target.refId,
      fields: [
        { name: 'Time', type: FieldType.time, config: { interval: stepMs }, values: values.map(([at]) => at * 1000) },
        {
          name: 'Value',
          type: FieldType.number,
          config: { ...configOf(panel, target), displayNameFromDS: legend },
          // A quantile of no observations is NaN. Grafana draws it as a gap.
          values: values.map(([, text]) => (Number.isNaN(Number(text)) ? null : Number(text))),
        },
      ],
    })
  );
  found.forEach((frame, index) => {
    const field = frame.fields[1];
    field.state = { seriesIndex: index, displayName: field.config.displayNameFromDS };
    field.display = getDisplayProcessor({ field, theme, timeZone });
  });
  return found;
}

function Stat({ frames, panel, width, height }) {
  const field = frames[0].fields[1];
  const last = field.values.filter((value) => value !== null).at(-1);
  return (
    <BigValue
      width={width}
      height={height}
      theme={theme}
      value={field.display(last)}
      colorMode={panel.options.colorMode}
      graphMode={panel.options.graphMode}
      sparkline={{ y: field, x: frames[0].fields[0] }}
    />
  );
}

function Panel({ panel }) {
  const { x, y, w, h } = panel.gridPos;
  const place = { position: 'absolute', left: x * cellPx.width, top: y * cellPx.height };
  if (panel.type === 'row') {
    return <h4 style={{ ...place, margin: 8 }}>{panel.title}</h4>;
  }
  const frames = framesOf(panel);
  const width = w * cellPx.width - cellPx.gap;
  const height = h * cellPx.height - cellPx.gap;
  const legend = { showLegend: true, calcs: [], displayMode: 'list', placement: 'bottom', ...panel.options.legend };
  return (
    <div style={place}>
      <PanelChrome title={panel.title} width={width} height={height}>
        {(innerWidth, innerHeight) =>
          frames.length === 0 ? (
            'No data'
          ) : panel.type === 'stat' ? (
            <Stat frames={frames} panel={panel} width={innerWidth} height={innerHeight} />
          ) : (
            <TimeSeries
              frames={frames}
              structureRev={1}
              timeRange={timeRange}
              timeZone={timeZone}
              width={innerWidth}
              height={innerHeight}
              legend={legend}
              options={panel.options}
              tooltip={TooltipDisplayMode.None}
            />
          )
        }
      </PanelChrome>
    </div>
  );
}

createRoot(document.getElementById('dashboard')).render(
  <ThemeContext.Provider value={theme}>
    {dashboard.panels.map((panel) => (
      <Panel key={panel.id} panel={panel} />
    ))}
  </ThemeContext.Provider>
);
